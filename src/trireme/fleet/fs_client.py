"""PaddleRec's `fs_client.*` as the storage options that Trireme reads with."""

from typing import Any

from trireme.errors import BadRequest


def fs_client_options(
    uri: str = "", user: str = "", passwd: str = "", hadoop_bin: str = ""
) -> tuple[str, dict[str, Any]]:
    """Convert the settings.

    `uri` (hdfs://host:port) is prepended to data paths without a protocol, `user` is the user of
    the file system. HDFS is read through libhdfs, not through the `hadoop` command, and has no
    passwords: it trusts the name of a user, or a Kerberos ticket.

    Returns:
        The prefix of relative paths, "" for local files; storage_options of QueueDataset.

    Raises:
        BadRequest: a password or a hadoop_bin, which would have no effect, or another protocol.
    """
    if not uri:
        others = {"user": user, "passwd": passwd, "hadoop_bin": hadoop_bin}
        without_effect = [name for name, value in others.items() if value]
        if without_effect:
            raise BadRequest(
                f"fs_client: expected uri beside {', '.join(without_effect)}, found none"
            )
        return "", {}
    protocol = uri.partition("://")[0]
    if protocol not in ("hdfs", "viewfs"):
        raise BadRequest(
            f"fs_client.uri: expected hdfs://HOST:PORT or viewfs://NAME, found {uri!r}"
        )
    if passwd:
        raise BadRequest(
            "fs_client.passwd: expected none, because HDFS knows users and Kerberos tickets "
            "(kinit) but no passwords; remove the key"
        )
    if hadoop_bin:
        raise BadRequest(
            "fs_client.hadoop_bin: expected none, because libhdfs reads HDFS without the hadoop "
            f"command; remove {hadoop_bin!r} and set HADOOP_HOME and CLASSPATH (docs/data.md)"
        )
    return uri.rstrip("/"), {"user": user} if user else {}
