"""Identity and rights of clients: users, tokens, certificates, and the access control list.

It knows neither HTTP nor the broker; both ask it.
"""
