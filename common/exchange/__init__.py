"""What travels between server and device: the messages, their protobuf form, and the transforms on updates."""
