"""What is stored for clients: responses, files and batches."""
