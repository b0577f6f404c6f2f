"""Grammars for llguidance: conversion, limits of their cost, and the process that tries them."""
