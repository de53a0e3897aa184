"""Stores of the server's state: SQLite and folders of blobs, or PostgreSQL and S3."""
