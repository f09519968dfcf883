#!/bin/bash
echo one > draft
