#!/bin/bash
sed -i "s/numbers = list/numbers = sorted/" median.py
