"""`python -m smqrt` is the same as the command `smqrt`."""

from smqrt.cli import main

main()
