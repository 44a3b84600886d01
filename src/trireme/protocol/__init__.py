"""What servers, coordinator and workers have in common: messages, routing, shared values."""
