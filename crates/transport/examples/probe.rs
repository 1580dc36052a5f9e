//! Measures a link by the bulk path, between two processes with identities of their own.
//!
//! ```text
//! probe id STATE                                       prints the fingerprint
//! probe serve STATE LISTEN PEER-FINGERPRINT            answers until killed
//! probe run STATE ADDRESS PEER-FINGERPRINT [SECONDS [BANDWIDTH [STREAMS]]]
//! ```

#![allow(clippy::print_stdout, clippy::print_stderr)]

use longhaul_protocol::units::parse_bit_rate;
use longhaul_transport::{
    Endpoint, EndpointConfig, Hello, Identity, ProbeConfig, Scope, TrustStore, TrustedHost,
};
use std::error::Error;
use std::path::Path;
use std::time::Duration;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["id", state] => {
            println!("{}", Identity::load_or_create(Path::new(state))?.host_id());
            Ok(())
        }
        ["serve", state, listen, peer] => {
            let endpoint = endpoint(state, listen, peer, &[])?;
            println!("listening on {}", endpoint.local_address()?);
            while endpoint.accept().await.is_some() {}
            Ok(())
        }
        ["run", state, address, peer, ref rest @ ..] => run(state, address, peer, rest).await,
        _ => Err("see the head of the source for what to type".into()),
    }
}

fn endpoint(
    state: &str,
    listen: &str,
    peer: &str,
    addresses: &[&str],
) -> Result<Endpoint, Box<dyn Error>> {
    let state = Path::new(state);
    let identity = Identity::load_or_create(state)?;
    let trust = TrustStore::open(&state.join("trust.toml"))?;
    trust.replace(TrustedHost {
        name: "peer".to_owned(),
        id: peer.parse()?,
        addresses: addresses.iter().map(|text| (*text).to_owned()).collect(),
        scope: Scope {
            may_query: true,
            may_send_guests: false,
        },
    })?;
    let hello = Hello {
        version_min: 1,
        version_max: 1,
        software: "longhaul probe".to_owned(),
        incarnation: None,
    };
    let config = EndpointConfig::new(listen.parse()?, hello);
    Ok(Endpoint::bind(config, identity, trust)?)
}

async fn run(state: &str, address: &str, peer: &str, rest: &[&str]) -> Result<(), Box<dyn Error>> {
    let listen = if address.starts_with('[') {
        "[::]:0"
    } else {
        "0.0.0.0:0"
    };
    let endpoint = endpoint(state, listen, peer, &[address])?;
    let mut config = ProbeConfig::default();
    if let Some(seconds) = rest.first() {
        config.duration = Duration::from_secs_f64(seconds.parse()?);
    }
    if let Some(bandwidth) = rest.get(1).filter(|text| **text != "-") {
        config.bandwidth_bps = Some(parse_bit_rate(bandwidth)?);
    }
    if let Some(streams) = rest.get(2) {
        config.streams = streams.parse()?;
    }
    let verbose = std::env::var_os("VERBOSE").is_some();
    let (mut shown, mut bytes) = (Duration::ZERO, 0);
    let report = endpoint.probe("peer", config, |sample| {
        if verbose && sample.at >= shown + Duration::from_millis(500) {
            let seconds = (sample.at - shown).as_secs_f64();
            let rate = (sample.bytes_received - bytes) as f64 * 8e-6 / seconds;
            eprintln!(
                "{:6.2} s {rate:7.1} Mbit/s rtt {:?} cwnd {} lost {} wire {:.1} Mbit/s",
                sample.at.as_secs_f64(),
                sample.stats.rtt,
                sample.stats.congestion_window_bytes,
                sample.stats.packets_lost,
                sample.stats.delivery_rate_bps as f64 * 1e-6,
            );
            (shown, bytes) = (sample.at, sample.bytes_received);
        }
    });
    let report = report.await?;
    println!(
        "throughput_mbit {:.1} late_mbit {:.1} wire_mbit {:.1} rtt_idle_ms {:.2} \
         rtt_loaded_ms {:.2} loss {:.5}",
        report.throughput_bps as f64 * 1e-6,
        report.throughput_late_bps as f64 * 1e-6,
        report.wire_bps as f64 * 1e-6,
        report.rtt_idle.as_secs_f64() * 1e3,
        report.rtt_loaded.as_secs_f64() * 1e3,
        report.loss,
    );
    endpoint.close("done").await;
    Ok(())
}
