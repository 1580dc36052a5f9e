//! Implements the commands: each asks an agent and prints its answer.

mod args;
mod connect;
mod doctor;
mod error;
mod events;
mod front;
mod group;
mod image;
mod journal;
mod migrate;
mod output;
mod paint;
mod parcel;
mod picture;
mod realm;
mod rendezvous;
mod replica;
mod resolve;
mod self_test;
mod set_aside;
mod show;
mod tracked_writes;

use crate::agent;
use args::{
    Cli, Command, GuestsCommand, HostArgs, HostCommand, IdArgs, LimitArgs, PlanArgs, ProbeArgs,
    ReportArgs, TrustArgs,
};
use clap::{CommandFactory, Parser};
use error::{CliError, ErrorDocument};
use longhaul_api::{
    ApiError, AttachGuest, Client, ErrorCode, GuestState, JoinRealm, Limit, PlanRequest, Probe,
    StartGuest, StopGuest, Trust,
};
use longhaul_hypervisor::guest_agent;
use longhaul_hypervisor::memory::page_server;
use longhaul_protocol::units::show_bit_rate;
use output::Output;
use paint::{Line, Tone};
use serde::Serialize;
use serde_json::json;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::signal::unix::{SignalKind, signal};

/// The maximum size of a guest's description that is sent to an agent, in bytes.
const DESCRIPTION_BYTES_MAX: u64 = 128 << 10;

/// Runs the command of the command line.
pub(crate) fn run() -> ExitCode {
    let cli = Cli::parse();
    let output = Output::new(cli.json);
    if let Command::DiskFront(args) = &cli.command {
        log_to_stderr();
        return front::run(args);
    }
    if let Command::PageServer { socket } = &cli.command {
        log_to_stderr();
        return serve_pages(socket);
    }
    // A parcel's devices may be at terminals: they are written and read in threads of their own.
    let is_parallel = matches!(
        cli.command,
        Command::Agent(_) | Command::Rendezvous(_) | Command::Parcel(_)
    );
    let result = runtime(is_parallel)
        .map_err(CliError::from)
        .and_then(|runtime| {
            let result = runtime.block_on(perform(cli, &output));
            // A thread may still wait for a line of the terminal; it is abandoned.
            runtime.shutdown_background();
            result
        });
    match result {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            if output.json {
                // The exit code reports the error even if this cannot be written.
                let _ = output.json_line(&ErrorDocument { error: &error });
            }
            output.aside(&error.lines());
            ExitCode::from(error.exit_code)
        }
    }
}

/// Freezes the file systems of a guest until the program that started this one says so or ends.
/// Signals that end other programs do not end this one. It ends by itself within seconds.
async fn guard_frozen(port: &Path, note: &Path) -> std::io::Result<()> {
    let kinds = [
        SignalKind::terminate(),
        SignalKind::interrupt(),
        SignalKind::hangup(),
    ];
    let _ignored = kinds.map(signal);
    let (asks, says) = (tokio::io::stdin(), tokio::io::stdout());
    guest_agent::freeze::guard(port, note, asks, says).await;
    Ok(())
}

fn runtime(is_parallel: bool) -> std::io::Result<tokio::runtime::Runtime> {
    let mut builder = if is_parallel {
        tokio::runtime::Builder::new_multi_thread()
    } else {
        tokio::runtime::Builder::new_current_thread()
    };
    builder.enable_all().build()
}

async fn perform(cli: Cli, output: &Output) -> Result<u8, CliError> {
    let client = || connect::client(&cli.connection);
    match cli.command {
        Command::Agent(args) if args.list_fail_points => {
            let mut points = longhaul_migration::host::fail_point::all().join("\n");
            points.push('\n');
            output.text(points.as_bytes())?;
        }
        Command::Agent(args) => {
            log_to_stderr();
            agent::run(args.config.as_deref()).await?;
        }
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "longhaul", &mut script);
            output.text(&script)?;
        }
        Command::Image(args) => return image::run(output, args),
        Command::Parcel(args) => return parcel::run(output, &client()?, args).await,
        // Handled before the runtime is created.
        Command::DiskFront(_) | Command::PageServer { .. } => {}
        Command::FreezeGuard { port, note } => {
            log_to_stderr();
            guard_frozen(&port, &note).await?;
        }
        Command::Realm(args) => return realm::realm(output, args).await,
        Command::Network(args) => return realm::network(output, args),
        Command::Rendezvous(args) => {
            log_to_stderr();
            rendezvous::run(output, args).await?;
        }
        Command::Host(HostArgs {
            command: Some(HostCommand::Invite(args)),
        }) => realm::invite(output, args)?,
        Command::Host(HostArgs {
            command: Some(HostCommand::Remove(args)),
        }) => realm::remove(output, args)?,
        Command::Journal { command } => return journal::run(output, command),
        Command::Doctor(args) => return doctor::doctor(client()?, output, args).await,
        Command::Host(args) => host(&client()?, output, args.command).await?,
        Command::Hosts => hosts(&client()?, output).await?,
        Command::Guests(args) => guests(&client()?, output, args.command).await?,
        Command::Plan(args) => return plan(&client()?, output, args).await,
        Command::Migrate(args) => return migrate::migrate(&client()?, output, args).await,
        Command::Cancel(IdArgs { migration }) => {
            return migrate::cancel(&client()?, output, &migration).await;
        }
        Command::Resolve(args) => return resolve::resolve(&client()?, output, args).await,
        Command::Limit(args) => limit(&client()?, output, args).await?,
        Command::Report(args) => report(&client()?, output, args).await?,
        Command::Replicate(args) => return replica::replicate(&client()?, output, args).await,
        Command::Replicas(args) => return replica::replicas(client, output, args).await,
        Command::Failover(args) => return replica::failover(&client()?, output, args).await,
        Command::Events => return events::follow(&client()?, output).await,
        Command::Migrations => {
            let list = client()?.migrations().await?;
            show(output, &list, || {
                show::list::migrations(&list.migrations, now_unix_ms(), output.width())
            })?;
        }
    }
    Ok(0)
}

/// Serves QEMU's requests for pages until it has all of them, or has ended.
fn serve_pages(socket: &Path) -> ExitCode {
    match page_server::run(socket) {
        Ok(end) => {
            tracing::info!("{end}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn log_to_stderr() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("LONGHAUL_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(console::Term::stderr().is_term())
        .with_writer(std::io::stderr)
        .init();
}

fn show(
    output: &Output,
    content: &impl Serialize,
    lines: impl FnOnce() -> Vec<Line>,
) -> Result<(), CliError> {
    if output.json {
        output.document(content)?;
    } else {
        output.lines(&lines())?;
    }
    Ok(())
}

fn done(text: String) -> Vec<Line> {
    vec![Line::default().tone(Tone::Good, "✓ ").plain(text)]
}

fn now_unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    })
}

fn whole_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

async fn hosts(client: &Client, output: &Output) -> Result<(), CliError> {
    let own = client.host().await?.fingerprint;
    let realm = client.realm().await?.realm;
    let members = realm.map_or_else(Vec::new, |realm| realm.members);
    let trusted = client.hosts().await?.hosts;
    show(
        output,
        &json!({ "members": members, "trusted": trusted }),
        || show::list::known_hosts(&own, &members, &trusted),
    )
}

async fn host(
    client: &Client,
    output: &Output,
    command: Option<HostCommand>,
) -> Result<(), CliError> {
    match command.unwrap_or(HostCommand::Show) {
        HostCommand::Show => {
            let host = client.host().await?;
            show(output, &host, || show::list::host(&host))
        }
        HostCommand::List => {
            let hosts = client.hosts().await?;
            show(output, &hosts, || show::list::hosts(&hosts.hosts))
        }
        HostCommand::Trust(args) => trust(client, output, args).await,
        HostCommand::Forget { name } => {
            client.forget(&name).await?;
            show(output, &json!({ "forgotten": name }), || {
                done(format!("{name} is trusted no longer"))
            })
        }
        HostCommand::Join { token } => {
            let status = client.join_realm(&JoinRealm { token }).await?;
            show(output, &status, || show::realm::joined(&status))
        }
        HostCommand::Realm => {
            let status = client.realm().await?;
            show(output, &status, || show::realm::realm(&status))
        }
        HostCommand::Leave => {
            client.leave_realm().await?;
            show(output, &json!({ "left": true }), || {
                let mut lines = done("this host is in no realm any more".to_owned());
                let text = "  its operator removes it with:  longhaul host remove NAME";
                lines.push(Line::text(text));
                lines
            })
        }
        // Handled before an agent is asked.
        HostCommand::Invite(_) | HostCommand::Remove(_) => Ok(()),
        HostCommand::Probe(ProbeArgs {
            name,
            seconds,
            bandwidth,
        }) => {
            let probe = Probe {
                seconds,
                bandwidth_bps: bandwidth,
            };
            let result = client.probe(&name, &probe).await?;
            show(output, &result, || show::list::probe(&result))
        }
    }
}

async fn trust(client: &Client, output: &Output, args: TrustArgs) -> Result<(), CliError> {
    let mut may: Vec<_> = args.may.into_iter().filter_map(args::May::scope).collect();
    may.sort();
    may.dedup();
    let trust = Trust {
        name: args.name,
        fingerprint: args.fingerprint,
        addresses: args.addresses,
        may,
        replace: args.replace,
    };
    let host = client.trust(&trust).await?;
    show(output, &host, || {
        done(format!(
            "{} is trusted; it may: {}",
            host.name,
            show::list::may(&host.may)
        ))
    })
}

async fn guests(
    client: &Client,
    output: &Output,
    command: Option<GuestsCommand>,
) -> Result<(), CliError> {
    match command.unwrap_or(GuestsCommand::List) {
        GuestsCommand::List => {
            let guests = client.guests().await?;
            show(output, &guests, || show::list::guests(&guests.guests))
        }
        GuestsCommand::Start { guest } => {
            let guest = client.start_guest(&start_guest(&guest)?).await?;
            show(output, &guest, || {
                let pid = guest
                    .pid
                    .map_or(String::new(), |pid| format!(" (pid {pid})"));
                done(format!("{} is started{pid}", guest.name))
            })
        }
        GuestsCommand::Attach { name, qmp, pid } => {
            let qmp = std::path::absolute(&qmp)?;
            let qmp = qmp.display().to_string();
            let guest = client
                .attach_guest(&name, &AttachGuest { qmp, pid })
                .await?;
            show(output, &guest, || {
                done(format!(
                    "{} can be moved; nothing of it was changed",
                    guest.name
                ))
            })
        }
        GuestsCommand::Discover => {
            let found = client.discover_guests().await?;
            show(output, &found, || show::discovered::guests(&found.guests))
        }
        GuestsCommand::Detach { name } => {
            client.detach_guest(&name).await?;
            show(output, &json!({ "detached": name }), || {
                done(format!("{name} is forgotten, and continues to run"))
            })
        }
        GuestsCommand::TrackWrites { name, show, stop } => {
            tracked_writes::run(client, output, &name, (show, stop)).await
        }
        GuestsCommand::Resume { name } => {
            let guest = client.resume_guest(&name).await?;
            show(output, &guest, || done(format!("{} runs", guest.name)))
        }
        GuestsCommand::Reclaim(args) => resolve::reclaim(client, output, args).await,
        GuestsCommand::Stop { name, force } => {
            let guest = client.stop_guest(&name, &StopGuest { force }).await?;
            show(output, &guest, || match guest.state {
                GuestState::Stopped => done(format!("{} is stopped", guest.name)),
                _ => vec![
                    Line::text(format!("{} is ", guest.name))
                        .plain(show::list::guest_state(&guest).render(usize::MAX, false)),
                ],
            })
        }
    }
}

/// Returns a description from a file of that name if there is one, else the name of a guest.
fn start_guest(guest: &str) -> Result<StartGuest, CliError> {
    let path = Path::new(guest);
    let looks_like_a_file = guest.contains('/') || guest.ends_with(".toml");
    if !looks_like_a_file {
        return Ok(StartGuest::Name(guest.to_owned()));
    }
    let cannot = |what: String| {
        CliError::usage(
            format!("cannot read {guest}: {what}"),
            "give the file of a description, or the name of a guest that `longhaul guests` lists",
        )
    };
    let found = std::fs::metadata(path).map_err(|error| cannot(error.to_string()))?;
    if found.len() > DESCRIPTION_BYTES_MAX {
        return Err(cannot("it is larger than 128 KiB".to_owned()));
    }
    let text = std::fs::read_to_string(path).map_err(|error| cannot(error.to_string()))?;
    Ok(StartGuest::Description(text))
}

async fn plan(client: &Client, output: &Output, args: PlanArgs) -> Result<u8, CliError> {
    let request = PlanRequest {
        guest: args.guest,
        to: args.to,
        downtime_ms: whole_ms(args.wishes.downtime),
        bandwidth_bps: args.wishes.bandwidth,
        strategy: args.wishes.strategy,
        early_release: args.wishes.early_release,
        require_arbiter: args.wishes.require_arbiter,
        keep_memory: args.wishes.keep_memory,
        convergence: args.wishes.ending.convergence(),
    };
    let plan = client.plan(&request).await?;
    show(output, &plan, || show::plan::plan(&plan, output.width()))?;
    Ok(if plan.possible { 0 } else { 3 })
}

async fn limit(client: &Client, output: &Output, args: LimitArgs) -> Result<(), CliError> {
    let id = migrate::find(client, &args.migration).await?;
    let limit = Limit {
        bandwidth_bps: args.rate.0,
    };
    let migration = client.limit(&id, &limit).await?;
    show(output, &migration, || {
        let rate = args.rate.0.map_or_else(
            || "as fast as the link takes".to_owned(),
            |rate| format!("at most {}", show_bit_rate(rate)),
        );
        done(format!("{} is sent {rate}", migration.guest))
    })
}

async fn report(client: &Client, output: &Output, args: ReportArgs) -> Result<(), CliError> {
    let id = match args.migration {
        Some(id) => id,
        None => {
            let list = client.migrations().await?.migrations;
            let latest = list.into_iter().next().ok_or_else(|| {
                let none = "no guest was moved from or to this host";
                CliError::api(&ApiError::new(ErrorCode::MigrationUnknown, none), 3)
            })?;
            latest.id
        }
    };
    let report = client.report(&id).await?;
    show(output, &report, || {
        show::report::report(&report, output.width())
    })
}
