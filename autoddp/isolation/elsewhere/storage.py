"""Stores of objects and files on other machines. What the code cannot say: their reads pass, also with large files."""

from __future__ import annotations

import re

from autoddp.isolation.elsewhere.patch import Call, Client, plain

_AWS_READ = re.compile(
    r"(Get|List|Head|Describe|BatchGet|Query$|Scan$|Search|Select|Lookup|Assume|Decrypt$|CreateSession$|CreateToken$)"
)
"""Beside the plain reads: assumed roles, S3 Express' CreateSession and CreateToken are logins."""


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


STORAGE = (
    Client("boto3", "botocore.client", "BaseClient._make_api_call", judge=_aws, vouches=True),
    Client("boto3", "aiobotocore.client", "AioBaseClient._make_api_call", judge=_aws, vouches=True),
    # The second way of boto3's uploads, through the AWS runtime in C: chosen by itself on large GPU machines.
    Client("boto3", "s3transfer.crt", "CRTTransferManager.upload CRTTransferManager.delete", "writes to S3", "bucket"),
    Client("boto3", "boto3.s3.inject", "upload_file upload_fileobj copy", "writes to S3", "Bucket"),
    Client("awscrt", "awscrt.s3", "S3Client.make_request", judge=_aws_runtime),
    Client(
        "s3torchconnector",
        "s3torchconnector._s3client._s3client s3torchconnector._s3client.s3client",
        "S3Client.put_object S3Client.delete_object S3Client.copy_object",
        target="bucket src_bucket",
    ),
    Client(
        "google-cloud-storage",
        "google.cloud.storage.blob",
        "Blob.upload_* Blob.delete Blob.compose Blob.rewrite Blob.update* Blob.create_* Blob.patch Blob.make_* "
        "Blob.set_*",
        "writes to a bucket",
    ),
    Client("google-cloud-storage", "google.cloud.storage.blob", "Blob.open", judge=_writing_mode),
    Client(
        "google-cloud-storage",
        "google.cloud.storage.bucket",
        "Bucket.create Bucket.delete* Bucket.copy_blob Bucket.rename_blob Bucket.move_blob Bucket.restore_blob "
        "Bucket.patch Bucket.update Bucket.make_* Bucket.lock_* Bucket.set_*",
        "changes a bucket",
    ),
    Client(
        "google-cloud-storage",
        "google.cloud.storage.client",
        "Client.create_* Client.restore_bucket",
        "creates",
        "bucket_or_name",
    ),
    Client(
        "azure-storage-blob",
        "azure.storage.blob._blob_client azure.storage.blob.aio._blob_client_async",
        "BlobClient.*",
        "writes to a container",
        reads="download_* query_* exists get_* list_* from_* close",
    ),
    Client(
        "azure-storage-blob",
        "azure.storage.blob._container_client azure.storage.blob.aio._container_client_async",
        "ContainerClient.*",
        "writes to a container",
        reads="download_* exists get_* list_* walk_* find_* from_* close",
    ),
    Client(
        "azure-storage-blob",
        "azure.storage.blob._blob_service_client azure.storage.blob.aio._blob_service_client_async",
        "BlobServiceClient.create_* BlobServiceClient.delete_* BlobServiceClient.undelete_* BlobServiceClient.set_*",
        "changes",
        "name container",
    ),
    Client(
        "azure-storage-file-datalake",
        "azure.storage.filedatalake._data_lake_file_client azure.storage.filedatalake._data_lake_directory_client",
        "DataLakeFileClient.create_* DataLakeFileClient.upload_* DataLakeFileClient.append_* "
        "DataLakeFileClient.flush_* DataLakeFileClient.delete_* DataLakeFileClient.rename_* "
        "DataLakeDirectoryClient.create_* DataLakeDirectoryClient.delete_* DataLakeDirectoryClient.rename_*",
        "writes to a container",
    ),
    Client(
        "oss2",
        "oss2.api",
        "Bucket.put_* Bucket.append_* Bucket.copy_* Bucket.update_* Bucket.delete_* Bucket.restore_* Bucket.batch_* "
        "Bucket.init_* Bucket.upload_* Bucket.complete_* Bucket.abort_* Bucket.create_* Bucket.set_bucket* "
        "Bucket.process_* Bucket.async_process_*",
        "writes",
        "key target_key",
    ),
    Client(
        "cos",
        "qcloud_cos.cos_client",
        "CosS3Client.put_* CosS3Client.append_* CosS3Client.copy* CosS3Client.update_* CosS3Client.delete_* "
        "CosS3Client.restore_* CosS3Client.upload_* CosS3Client.complete_* CosS3Client.abort_* CosS3Client.create_* "
        "CosS3Client.change_* CosS3Client.post_* CosS3Client.ci_put_* CosS3Client.ci_delete_*",
        target="Bucket",
    ),
    Client(
        "minio",
        "minio.api",
        "Minio.put_* Minio.fput_* Minio.append_* Minio.copy_* Minio.compose_* Minio.remove_* Minio.make_* Minio.set_* "
        "Minio.delete_* Minio.enable_object* Minio.disable_object* Minio.upload_* Minio.prompt_*",
        target="bucket_name",
    ),
    Client(
        "pyarrow",
        "pyarrow._s3fs pyarrow._gcsfs pyarrow._azurefs pyarrow._hdfs pyarrow.fs",
        " ".join(
            f"{kind}.{operation}"
            for kind in ("S3FileSystem", "GcsFileSystem", "AzureFileSystem", "HadoopFileSystem")
            for operation in ("open_output_stream", "open_append_stream", "create_dir", "delete_*", "copy_file", "move")
        ),
        "writes",
        "path src",
    ),
    Client("hf_xet", "hf_xet", "upload_files upload_bytes", "uploads"),
    Client(
        "paramiko",
        "paramiko.sftp_client",
        "SFTPClient.put SFTPClient.putfo SFTPClient.remove SFTPClient.unlink SFTPClient.rename SFTPClient.posix_rename "
        "SFTPClient.mkdir SFTPClient.rmdir SFTPClient.symlink SFTPClient.chmod SFTPClient.chown SFTPClient.utime "
        "SFTPClient.truncate",
        "writes",
        "remotepath path oldpath source",
    ),
    Client("paramiko", "paramiko.sftp_client", "SFTPClient.open SFTPClient.file", judge=_writing_mode),
    Client(
        "paramiko", "paramiko.channel", "Channel.exec_command Channel.invoke_shell", "runs a command on another machine"
    ),
    Client(
        "paramiko",
        "paramiko.client",
        "SSHClient.exec_command SSHClient.invoke_shell",
        "runs a command on another machine",
    ),
    Client(
        "asyncssh",
        "asyncssh.connection",
        "SSHClientConnection.create_process SSHClientConnection.run",
        "runs a command",
    ),
    Client("asyncssh", "asyncssh.sftp", "SFTPClient.put SFTPClient.mput SFTPClient.remove SFTPClient.rm*", "writes"),
    Client(
        "ftplib",
        "ftplib",
        "FTP.storbinary FTP.storlines FTP.delete FTP.rename FTP.mkd FTP.rmd",
        "writes",
        "cmd filename fromname dirname",
    ),
    Client("smbclient", "smbclient._os", "open_file", judge=_writing_mode),
    Client(
        "smbclient",
        "smbclient._os",
        "remove unlink rename replace mkdir makedirs rmdir removedirs truncate symlink link",
        "writes",
        "path src",
    ),
    Client("hdfs", "hdfs.client", "Client.write Client.upload Client.delete Client.rename Client.makedirs", "writes"),
)
