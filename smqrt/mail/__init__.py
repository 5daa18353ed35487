"""Mail: messages, and sending them over SMTP."""

from smqrt.mail.message import Mail
from smqrt.mail.smtp import MailServer

__all__ = ["Mail", "MailServer"]
