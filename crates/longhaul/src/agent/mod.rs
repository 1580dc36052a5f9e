//! Runs the agent: starts its parts, serves them, and stops without touching a guest.

mod allocator;
mod attach;
mod connections;
mod discover;
mod guests;
mod hosts;
mod http;
mod parcel_devices;
mod realm;
mod serve;
mod streams;
mod tls;

use crate::agent::guests::Guests;
use crate::agent::hosts::Hosts;
use crate::agent::http::Service;
use crate::agent::realm::Realms;
use crate::agent::serve::{TcpSocket, UnixSocket};
use longhaul_hypervisor::config::RunsAsRoot;
use longhaul_migration::Manager;
use longhaul_migration::host::config::Config;
pub(crate) use longhaul_migration::host::start_error::StartError;
use longhaul_migration::host::state::{Parts, StateLock};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::timeout;

/// The time limit for migrations to abort or to reach the other side when the agent stops.
const SHUT_DOWN_WAIT: Duration = Duration::from_secs(15);

/// Runs the agent until it is asked to stop.
pub(crate) async fn run(config_file: Option<&Path>) -> Result<(), StartError> {
    longhaul_migration::host::fail_point::arm()?;
    allocator::give_back();
    let config = Arc::new(Config::read(config_file)?);
    let cannot =
        |error: std::io::Error| StartError::new(format!("cannot wait for signals: {error}"));
    let mut terminate = signal(SignalKind::terminate()).map_err(cannot)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(cannot)?;

    let _lock = StateLock::take(&config.state)?;
    let tcp = match &config.api.tcp {
        Some(tcp) => Some(TcpSocket::open(tcp, tls::server_config(tcp, &config.state)?).await?),
        None => None,
    };
    // Last, as other programs wait for it.
    let socket = UnixSocket::open(&config.api.socket).await?;
    let parts = Parts::open(config.clone())?;
    let manager = Manager::start_up(parts.clone()).await?;
    let (prober, held) = (parts.prober.clone(), parts.held.clone());
    let slot = parts.networks.clone();
    let realms = Realms::start(manager.endpoint().clone(), &config, slot)?;
    let realms = Arc::new(realms);
    let service = Service {
        realms: realms.clone(),
        hosts: Arc::new(Hosts::new(parts.clone())),
        guests: Arc::new(Guests::new(parts)),
        manager: manager.clone(),
    };
    if let Err(error) = config.hypervisor.qemu.check_user() {
        let hint = RunsAsRoot::HINT;
        tracing::warn!(hint, "no guest can be started or taken: {error}");
    }
    // Takes seconds at the first start; later queries are answered from the cache.
    tokio::spawn(async move {
        if let Err(error) = prober.capabilities().await {
            tracing::warn!(%error, "no guest can be started or taken");
        }
    });
    let (stop, stopped) = watch::channel(false);
    let router = http::router(service);
    let unix_task = tokio::spawn(socket.serve(router.clone(), stopped.clone()));
    let tcp_task = tcp.map(|tcp| tokio::spawn(tcp.serve(router, stopped)));
    tracing::info!(
        host = %config.name,
        socket = %config.api.socket.display(),
        listen = %config.listen,
        state = %config.state.display(),
        "agent {} is ready",
        env!("CARGO_PKG_VERSION"),
    );

    let why = tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    };
    tracing::info!("{why}: stopping; guests go on running");
    if timeout(SHUT_DOWN_WAIT, manager.shut_down()).await.is_err() {
        tracing::warn!("migrations did not end in time; the journal holds where they are");
    }
    // Migrations go over its ways.
    realms.stop().await;
    stop.send_replace(true);
    if let Some(held) = held {
        held.stop();
    }
    for task in [Some(unix_task), tcp_task].into_iter().flatten() {
        if let Err(error) = task.await {
            tracing::error!(%error, "a part of the agent broke");
        }
    }
    tracing::info!("agent stopped");
    Ok(())
}
