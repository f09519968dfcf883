#!/bin/bash
echo early > note
sleep 600
echo late > note
