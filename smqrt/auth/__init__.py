"""Identity and permissions of clients: users, tokens, certificates, and the access control list.

HTTP and the broker use this package; it uses neither of them.
"""
