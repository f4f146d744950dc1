"""Semiseparable and quasiseparable scans."""
