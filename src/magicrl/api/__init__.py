"""magicrl from Python: what the commands call, and `import magicrl` offers. Importing the package loads none of it."""
