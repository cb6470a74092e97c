"""The alarms and events of Tidegate: what each says, what stops meanwhile, and what an operator does."""
