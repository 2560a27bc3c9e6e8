"""What the papers' tables and figures ask: one function each, rows out. Not installed."""
