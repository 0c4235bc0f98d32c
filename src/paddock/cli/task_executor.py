"""`paddock task-executor`: the task API for pods without envd."""

import click

from paddock.envd.tasks import executor


@click.command("task-executor")
@click.option(
    "--mode",
    type=click.Choice(executor.MODES),
    default="host",
    show_default=True,
    envvar="TASK_EXECUTOR_MODE",
    help="Run tasks here, in the main container of the pod, or in their own containers.",
)
@click.option(
    "--data-dir",
    default="/var/lib/sandbox/tasks",
    show_default=True,
    envvar="DATA_DIR",
    help="Keep the state of tasks here.",
)
@click.option(
    "--listen-addr",
    default="127.0.0.1:5758",
    show_default=True,
    envvar="LISTEN_ADDR",
    help="Listen on this address.",
)
@click.option(
    "--token",
    default="",
    envvar="TASK_EXECUTOR_TOKEN",
    help="Require this token of callers.  [default: none]",
)
@click.option("--enable-sidecar-mode", is_flag=True, envvar="ENABLE_SIDECAR_MODE", hidden=True)
@click.option(
    "--main-container-name",
    default="main",
    show_default=True,
    envvar="MAIN_CONTAINER_NAME",
    help="Name the main container.",
)
@click.option(
    "--cri-socket", default="", envvar="CRI_SOCKET", help="Use this CRI socket in container mode."
)
@click.option(
    "--pod-uid", default="", envvar="POD_UID", help="Start containers in the pod with this UID."
)
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
    """Serve the task API. Running tasks survive a restart of the executor."""
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
