"""The parts of a server process that the composition root, `smqrt.server.runtime`, puts together."""
