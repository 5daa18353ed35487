"""HTTP server and client: parser, directory tree, static files, sessions, logins."""
