"""What a replay found: figures, sentences, tables, a page; nothing here simulates."""
