"""Tools, one module a kind. A tool gets rendered fields and gives a value or raises ``ToolError``."""
