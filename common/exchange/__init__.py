"""Messages between server and device, their protobuf form, and the transforms on updates."""
