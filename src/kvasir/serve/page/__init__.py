"""The web page and the data that it shows."""
