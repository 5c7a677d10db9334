"""What makes a problem unusable: rules on its text, and judgements of its own answer and solutions."""
