#!/bin/bash
mkdir -p outbox
find inbox -name "*.txt" | while read -r file; do cp "$file" "outbox/$(basename "$file" | tr a-z A-Z)"; done
