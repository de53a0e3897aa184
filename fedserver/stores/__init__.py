"""Where the server's state lies: the database, and folders of blobs."""
