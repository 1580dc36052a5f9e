//! Implements `longhaul rendezvous`: runs the server, and copies its store.

use crate::cli::args::{RendezvousArgs, RendezvousCommand, ServeArgs};
use crate::cli::error::CliError;
use crate::cli::output::Output;
use crate::cli::realm::hex;
use crate::cli::{done, show};
use longhaul_realm::relay::Rate;
use longhaul_rendezvous::{Limits, Options, Rendezvous, backup};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

/// The time in which a relay may send at once what it sends on average, as a share of a second.
const BURST: u64 = 50;

/// Runs a server until it is asked to stop, or copies its store.
pub(crate) async fn run(output: &Output, args: RendezvousArgs) -> Result<(), CliError> {
    match args.command {
        None => serve(args.serve).await,
        Some(RendezvousCommand::Backup { state, file }) => {
            let file = std::path::absolute(file)?;
            let to = file.clone();
            let copied = tokio::task::spawn_blocking(move || backup(&state, &to)).await;
            copied
                .map_err(|error| CliError::failed("rendezvous", error.to_string()))?
                .map_err(|error| CliError::failed("rendezvous", error.to_string()))?;
            let shown = file.display().to_string();
            show(output, &json!({ "backup": shown }), || {
                done(format!("the store is copied to {shown}"))
            })
        }
    }
}

fn rate(bits_per_s: u64) -> Rate {
    let per_s = bits_per_s / 8;
    Rate {
        per_s,
        burst: (per_s / BURST).max(64 << 10),
    }
}

async fn serve(args: ServeArgs) -> Result<(), CliError> {
    if args.realms.is_empty() {
        return Err(CliError::usage(
            "a rendezvous server needs a realm",
            "--realm ID; `longhaul realm show` has the id",
        ));
    }
    let cannot = |error: &dyn std::fmt::Display| CliError::failed("rendezvous", error.to_string());
    let mut terminate = signal(SignalKind::terminate()).map_err(|error| cannot(&error))?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(|error| cannot(&error))?;
    let mut limits = Limits {
        connections: args.hosts,
        ..Limits::default()
    };
    limits.relay.sessions = args.sessions;
    limits.relay.session = rate(args.session_bandwidth);
    limits.relay.host = rate(args.session_bandwidth.saturating_mul(2));
    limits.relay.total = rate(args.relay_bandwidth);
    let server = Rendezvous::start(Options {
        listen: args.listen,
        listen_tcp: args.listen_tcp,
        listen_stun: args.listen_stun,
        state: args.state.clone(),
        realms: args.realms.clone(),
        limits,
        software: format!("longhaul {}", env!("CARGO_PKG_VERSION")),
    });
    let server = server.await.map_err(|error| cannot(&error))?;
    let listen = server.local_address().map_err(|error| cannot(&error))?;
    for realm in args.realms {
        let version = server.version(realm).unwrap_or(0);
        tracing::info!(%realm, version, "serves a realm");
    }
    let tcp = server.tcp_address().map(|address| address.to_string());
    tracing::info!(
        fingerprint = %server.id(),
        %listen,
        tcp = tcp.as_deref().unwrap_or("none"),
        store = hex(&server.store_id().0),
        state = %args.state.display(),
        "rendezvous server {} is ready",
        env!("CARGO_PKG_VERSION"),
    );
    let why = tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    };
    let (counters, relayed) = server.counters();
    tracing::info!(?counters, ?relayed, "{why}: stopping");
    server.stop().await;
    Ok(())
}
