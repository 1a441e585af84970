# noqa: A005 - mirrors headrace.http
