"""State of a server in PostgreSQL and S3: stores, standbys that take over, and transfers between devices and S3 themselves."""
