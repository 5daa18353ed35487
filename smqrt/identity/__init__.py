"""Who a client is and what it may do: users, tokens, certificates, and the access control list.

It knows neither HTTP nor the broker; both ask it.
"""
