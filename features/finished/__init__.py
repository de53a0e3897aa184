"""What a device's owner does with finished models: pictures of their answers, and a watch for drift."""
