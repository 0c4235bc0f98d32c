"""`paddock task-executor`: the task API for pods, where no envd serves the sandbox."""

import click

from paddock.envd.tasks import executor


@click.command("task-executor")
@click.option(
    "--mode",
    type=click.Choice(executor.MODES),
    default="host",
    show_default=True,
    envvar="TASK_EXECUTOR_MODE",
    help="Where tasks run: here, in the pod's main container, or in containers of their own.",
)
@click.option("--data-dir", default="/var/lib/sandbox/tasks", show_default=True, envvar="DATA_DIR")
@click.option("--listen-addr", default="127.0.0.1:5758", show_default=True, envvar="LISTEN_ADDR")
@click.option("--token", default="", envvar="TASK_EXECUTOR_TOKEN", help="Asked of every caller.")
@click.option("--enable-sidecar-mode", is_flag=True, envvar="ENABLE_SIDECAR_MODE", hidden=True)
@click.option(
    "--main-container-name", default="main", show_default=True, envvar="MAIN_CONTAINER_NAME"
)
@click.option("--cri-socket", default="", envvar="CRI_SOCKET", help="For container mode.")
@click.option("--pod-uid", default="", envvar="POD_UID", help="Whose pod containers join.")
def task_executor(
    mode: str,
    data_dir: str,
    listen_addr: str,
    token: str,
    enable_sidecar_mode: bool,
    main_container_name: str,
    cri_socket: str,
    pod_uid: str,
) -> None:
    """Serve the task API; what is under way outlives the executor and is found again."""
    executor.run(
        executor.ExecutorOptions(
            mode="sidecar" if enable_sidecar_mode else mode,
            data_dir=data_dir,
            listen=listen_addr,
            token=token,
            main_container=main_container_name,
            cri_socket=cri_socket,
            pod_uid=pod_uid,
        )
    )
