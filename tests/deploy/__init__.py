"""What is shipped for other people's machines: chart, compose file, container files, alerts."""
