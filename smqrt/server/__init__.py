"""The parts of a server process that the composition root, `smqrt.runtime`, puts together."""
