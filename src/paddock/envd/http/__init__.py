"""A small HTTP/1.1 server: requests, headers, multipart."""
