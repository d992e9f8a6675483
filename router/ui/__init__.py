"""The dashboard's page, script and style; router/api/ui.py serves them."""
