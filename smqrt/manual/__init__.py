"""The manual: its pages, and how they are served."""
