"""SMQ client of `smqrt.client`."""
