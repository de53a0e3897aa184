"""Stores of the server's state: SQLite and folders of blobs, and what other stores share with them."""
