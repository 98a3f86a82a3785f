"""Stores of objects and files on other machines. Their reads pass, also those of large files."""

from __future__ import annotations

import re

from autoddp.isolation.elsewhere.patch import Call, Client, plain

_AWS_READ = re.compile(
    r"(Get|List|Head|Describe|BatchGet|Query$|Scan$|Search|Select|Lookup|Assume|Decrypt$|CreateSession$|CreateToken$)"
)
"""Names of AWS operations that pass: reads, and logins (assumed roles, S3 Express' CreateSession and CreateToken)."""


def _aws(call: Call) -> str:
    operation, parameters = (*call.args, None, None)[:2]
    if _AWS_READ.match(str(operation)):
        return ""
    model = getattr(getattr(call.owner, "meta", None), "service_model", None)
    what = parameters.get("Bucket") if isinstance(parameters, dict) else None
    where = f" on {plain(what)}" if what else ""
    return f"calls {operation} of {getattr(model, 'service_name', 'a service')}{where}"


def _aws_runtime(call: Call) -> str:
    kind = call.argument("type")
    if getattr(kind, "name", "") == "GET_OBJECT":
        return ""
    request = call.argument("request")
    method = str(getattr(request, "method", ""))
    return "" if kind is None and method in ("GET", "HEAD") else f"sends {method}"


def _writing_mode(call: Call) -> str:
    mode = str(call.argument("mode", default="r"))
    return f"writes {plain(call.argument('filename', 'path', default=call.owner))}" if set(mode) & set("wax+") else ""


_ELSEWHERE = re.compile(r"(?!file:)[a-z][a-z0-9+.-]+://", re.IGNORECASE)


def _natively(call: Call) -> str:
    """C++ or Rust writes it, past all that Python's own checks see: only the place tells where."""
    system, place = call.argument("filesystem"), call.argument("base_dir", "file", "path", "target")
    kind = getattr(getattr(system, "base_fs", system), "type_name", "local")
    here = kind in ("local", "mock") or kind.startswith("py::")  # a file system in Python, which is checked itself
    here = here and not any(_ELSEWHERE.match(str(each)) for each in (system, place))
    return "" if here else f"writes {plain(place)}"


# fmt: off
STORAGE = (
    Client("boto3", "botocore.client", "BaseClient._make_api_call", judge=_aws, reads_may_post=True),
    Client("boto3", "aiobotocore.client", "AioBaseClient._make_api_call", judge=_aws, reads_may_post=True),
    # The second way of boto3's uploads, through the AWS runtime in C: boto3 chooses it on large GPU machines.
    Client("boto3", "s3transfer.crt", "CRTTransferManager.upload .delete", "writes to S3", "bucket"),
    Client("boto3", "boto3.s3.inject", "upload_file upload_fileobj copy", "writes to S3", "Bucket"),
    Client("awscrt", "awscrt.s3", "S3Client.make_request", judge=_aws_runtime),
    Client("s3torchconnector", "s3torchconnector._s3client._s3client s3torchconnector._s3client.s3client",
           "S3Client.put_object .delete_object .copy_object", target="bucket src_bucket"),
    Client("google-cloud-storage", "google.cloud.storage.blob",
           "Blob.upload_* .delete .compose .rewrite .update* .create_* .patch .make_* .set_*", "writes to a bucket"),
    Client("google-cloud-storage", "google.cloud.storage.blob", "Blob.open", judge=_writing_mode),
    Client("google-cloud-storage", "google.cloud.storage.bucket",
           "Bucket.create .delete* .copy_blob .rename_blob .move_blob .restore_blob .patch .update .make_* .lock_* "
           ".set_*", "changes a bucket"),
    Client("google-cloud-storage", "google.cloud.storage.client", "Client.create_* .restore_bucket", "creates",
           "bucket_or_name"),
    Client("azure-storage-blob", "azure.storage.blob._blob_client azure.storage.blob.aio._blob_client_async",
           "BlobClient.*", "writes to a container",
           reads="download_* query_* exists get_* list_* from_* close"),
    Client("azure-storage-blob", "azure.storage.blob._container_client azure.storage.blob.aio._container_client_async",
           "ContainerClient.*", "writes to a container",
           reads="download_* exists get_* list_* walk_* find_* from_* close"),
    Client("azure-storage-blob",
           "azure.storage.blob._blob_service_client azure.storage.blob.aio._blob_service_client_async",
           "BlobServiceClient.create_* .delete_* .undelete_* .set_*", "changes", "name container"),
    Client("azure-storage-file-datalake",
           "azure.storage.filedatalake._data_lake_file_client azure.storage.filedatalake._data_lake_directory_client",
           "DataLakeFileClient.create_* .upload_* .append_* .flush_* .delete_* .rename_* "
           "DataLakeDirectoryClient.create_* .delete_* .rename_*", "writes to a container"),
    Client("oss2", "oss2.api",
           "Bucket.put_* .append_* .copy_* .update_* .delete_* .restore_* .batch_* .init_* .upload_* .complete_* "
           ".abort_* .create_* .set_bucket* .process_* .async_process_*", "writes", "key target_key"),
    Client("cos", "qcloud_cos.cos_client",
           "CosS3Client.put_* .append_* .copy* .update_* .delete_* .restore_* .upload_* .complete_* .abort_* .create_* "
           ".change_* .post_* .ci_put_* .ci_delete_*", target="Bucket"),
    Client("minio", "minio.api",
           "Minio.put_* .fput_* .append_* .copy_* .compose_* .remove_* .make_* .set_* .delete_* .enable_object* "
           ".disable_object* .upload_* .prompt_*", target="bucket_name"),
    Client("pyarrow", "pyarrow._s3fs pyarrow._gcsfs pyarrow._azurefs pyarrow._hdfs pyarrow.fs",
           " ".join(f"{kind}.open_output_stream .open_append_stream .create_dir .delete_* .copy_file .move"
                    for kind in ("S3FileSystem", "GcsFileSystem", "AzureFileSystem", "HadoopFileSystem")),
           "writes", "path src"),
    Client("pyarrow", "pyarrow.dataset", "write_dataset", judge=_natively),
    Client("polars", "polars.dataframe.frame", "DataFrame.write_*", judge=_natively),
    Client("polars", "polars.lazyframe.frame", "LazyFrame.sink_*", judge=_natively),
    Client("hf_xet", "hf_xet", "upload_files upload_bytes", "uploads"),
    Client("paramiko", "paramiko.sftp_client",
           "SFTPClient.put .putfo .remove .unlink .rename .posix_rename .mkdir .rmdir .symlink .chmod .chown .utime "
           ".truncate", "writes", "remotepath path oldpath source"),
    Client("paramiko", "paramiko.sftp_client", "SFTPClient.open .file", judge=_writing_mode),
    Client("paramiko", "paramiko.channel", "Channel.exec_command .invoke_shell", "runs a command on another machine"),
    Client("paramiko", "paramiko.client", "SSHClient.exec_command .invoke_shell", "runs a command on another machine"),
    Client("asyncssh", "asyncssh.connection", "SSHClientConnection.create_process .run", "runs a command"),
    Client("asyncssh", "asyncssh.sftp", "SFTPClient.put .mput .remove .rm*", "writes"),
    Client("ftplib", "ftplib", "FTP.storbinary .storlines .delete .rename .mkd .rmd", "writes",
           "cmd filename fromname dirname"),
    Client("smbclient", "smbclient._os", "open_file", judge=_writing_mode),
    Client("smbclient", "smbclient._os",
           "remove unlink rename replace mkdir makedirs rmdir removedirs truncate symlink link", "writes", "path src"),
    Client("hdfs", "hdfs.client", "Client.write .upload .delete .rename .makedirs", "writes"),
)
# fmt: on
