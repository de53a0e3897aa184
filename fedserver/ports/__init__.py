"""The doors between the server's decisions and the world: narrow interfaces, each with an implementation in memory."""
