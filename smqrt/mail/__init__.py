"""Mail messages and an SMTP client."""

from smqrt.mail.smtp import Mail, MailServer

__all__ = ["Mail", "MailServer"]
