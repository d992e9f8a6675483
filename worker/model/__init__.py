"""Model folders: conversion, loading, and one file per family."""
