"""Code that server and devices share: errors, settings, the wire, identity, models, methods and data; opens no sockets."""
