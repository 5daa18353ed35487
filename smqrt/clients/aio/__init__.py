"""SMQ client of `smqrt.aio`, on asyncio."""
