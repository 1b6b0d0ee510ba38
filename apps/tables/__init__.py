"""Models of tables: categories and numbers of events and samples."""
