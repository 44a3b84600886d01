"""What servers, coordinator and workers share: messages, routing, values. Imports no role."""
