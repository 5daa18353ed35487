"""Mail messages and an SMTP client."""

from smqrt.mail.message import Mail
from smqrt.mail.smtp import MailServer

__all__ = ["Mail", "MailServer"]
