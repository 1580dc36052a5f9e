//! Passes messages about a device of a parcel between a command, over an upgraded connection of the
//! API, and the terminal to which the device is attached.

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use longhaul_api::{ApiError, DEVICE_PROTOCOL, DeviceStream, ErrorCode};
use longhaul_migration::{DeviceChannel, Manager};
use std::error::Error;

type Passed = Result<(), Box<dyn Error + Send + Sync>>;

/// Opens a channel to a device at a terminal. The answer changes the protocol of the connection.
pub(crate) async fn use_device(
    manager: &Manager,
    terminal: &str,
    mut request: Request,
) -> Result<Response, ApiError> {
    let upgrade = request.headers().get(header::UPGRADE);
    if upgrade.is_none_or(|name| name != DEVICE_PROTOCOL) {
        let what = format!("the request has no `Upgrade: {DEVICE_PROTOCOL}`");
        return Err(ApiError::new(ErrorCode::InvalidRequest, what));
    }
    let upgraded = hyper::upgrade::on(&mut request);
    let device = manager.parcel_device(terminal).await?;
    let terminal = terminal.to_owned();
    tokio::spawn(async move {
        if let Err(error) = pass(upgraded, device).await {
            tracing::info!(terminal, %error, "a device is not in use any more");
        }
    });
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static(DEVICE_PROTOCOL));
    Ok(response)
}

/// Passes messages until either side ends.
async fn pass(upgraded: OnUpgrade, device: DeviceChannel) -> Passed {
    let DeviceChannel {
        channel,
        connection: _connection,
    } = device;
    let DeviceStream {
        mut reader,
        mut writer,
    } = DeviceStream::of(TokioIo::new(upgraded.await?));
    let (mut sender, mut receiver) = channel.split();
    let to_terminal = async {
        while let Some(message) = reader.read().await? {
            sender.send(&message).await?;
        }
        sender.finish().await?;
        Passed::Ok(())
    };
    let from_terminal = async {
        while let Some(message) = receiver.recv().await? {
            writer.write(&message).await?;
        }
        Passed::Ok(())
    };
    tokio::select! {
        passed = to_terminal => passed,
        passed = from_terminal => passed,
    }
}
