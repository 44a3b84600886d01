"""The worker side of the wire: pull and push, dense parameters, transports."""
