"""The SMQ client behind `smqrt.client`."""
